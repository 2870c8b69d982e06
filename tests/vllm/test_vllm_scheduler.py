"""Which rows the scheduler's half calls final, in situations that vLLM on a CPU does not get into on demand.

Requests and scheduler outputs are plain objects with vLLM's attributes; test_run_*.py have the real ones.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lmcache_hs_backend.integrations.vllm.naming import KeyFormat
from lmcache_hs_backend.integrations.vllm.protocol import Finish, KeyInputs, Step
from lmcache_hs_backend.integrations.vllm.scheduler_side.tracker import RequestTracker
from lmcache_hs_backend.integrations.vllm.settings import ConnectorSettings

CHUNK, BLOCK = 16, 8


class Rig:
    """A scheduler's half, and one request that it follows."""

    def __init__(self, prompt: int, **settings: Any) -> None:
        self.given: list[Finish] = []
        config = ConnectorSettings.from_connector({"chunk_size": CHUNK, **settings})
        self.half = RequestTracker(config, KeyFormat("m", "bfloat16"), 0, BLOCK, self._hand_over)
        self.ids = list(range(1000, 1000 + prompt))
        self.request = SimpleNamespace(
            request_id="r", all_token_ids=self.ids, prompt_token_ids=list(self.ids), num_prompt_tokens=prompt,
            num_tokens=prompt, num_output_tokens=0, num_computed_tokens=0, num_in_flight_tokens=0, prompt_embeds=None,
            lora_request=None, mm_features=[], kv_transfer_params=None, get_finished_reason=lambda: "stop",
        )  # fmt: skip

    def _hand_over(self, finish: Finish) -> bool:
        self.given.append(finish)
        return False

    def start(self, blocks: list[int], scheduled: int, *, local: int = 0, computed: int = 0) -> Step:
        self.half.found_locally(self.request, local)
        self.half.allocated(self.request)
        self.request.num_computed_tokens = computed
        return self.step(scheduled, new=[SimpleNamespace(req_id="r", block_ids=(blocks,))])

    def step(
        self, scheduled: int, blocks: list[int] | None = None, new: list[Any] | None = None, preempted: bool = False
    ) -> Step:
        cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
        if new is None and not preempted:
            cached = SimpleNamespace(
                req_ids=["r"], new_block_ids=[None if blocks is None else (blocks,)], resumed_req_ids=set()
            )
        step = self.half.step(
            SimpleNamespace(
                total_num_scheduled_tokens=scheduled, preempted_req_ids={"r"} if preempted else None,
                scheduled_new_reqs=new or [], scheduled_cached_reqs=cached,
                num_scheduled_tokens={"r": scheduled} if scheduled else {},
            )
        )  # fmt: skip
        self.request.num_computed_tokens += scheduled
        return step

    def sample(self, *tokens: int) -> None:
        self.ids += tokens
        self.request.num_tokens += len(tokens)
        self.request.num_output_tokens += len(tokens)

    def preempt(self) -> Step:
        """The request loses its blocks in a step that runs others."""
        self.request.num_computed_tokens = 0
        return self.step(0, preempted=True)


def ends(step: Step) -> list[int]:
    return [chunk.ref.end for chunk in step.ready]


def test_a_chunk_is_taken_in_the_step_that_completes_it_with_the_blocks_that_hold_it() -> None:
    rig = Rig(40)
    assert ends(rig.start([9, 4], 15)) == []
    step = rig.step(20, [7, 1, 5])
    assert [(chunk.ref.start, chunk.ref.end, chunk.blocks) for chunk in step.ready] == [
        (0, 16, [9, 4]),
        (16, 32, [7, 1]),
    ]
    assert step.written == [(4, False), (7, True), (1, True), (5, True)]


def test_proposed_tokens_are_not_taken_before_they_are_known() -> None:
    rig = Rig(14)
    rig.start([9, 4, 2], 14)
    rig.sample(1)
    assert ends(rig.step(2)) == []  # token 15 is proposed: its row is there, and may be another token's
    rig.request.num_computed_tokens -= 1  # it was rejected
    rig.sample(2)
    assert ends(rig.step(2)) == [16]


def test_tokens_in_flight_do_not_count_as_known_under_asynchronous_scheduling() -> None:
    rig = Rig(14)
    rig.start([9, 4, 2], 14)
    rig.request.num_in_flight_tokens = 14
    assert ends(rig.step(2)) == []  # scheduled before the prompt's output is there
    rig.sample(1)
    rig.request.num_in_flight_tokens = 2
    assert ends(rig.step(2)) == []
    rig.sample(2)
    rig.request.num_computed_tokens -= 1
    assert ends(rig.step(2)) == [16]


def test_a_finished_request_leaves_all_but_its_last_token() -> None:
    rig = Rig(20)
    rig.start([9, 4, 2], 20)
    rig.sample(1)
    rig.step(2)
    rig.request.num_computed_tokens -= 1
    rig.sample(2)
    held, answer = rig.half.finish(rig.request, [9, 4, 2])
    (finish,) = rig.given
    assert [(chunk.ref.start, chunk.ref.end, chunk.blocks) for chunk in finish.ready] == [(16, 21, [2])]
    assert finish.record is not None
    assert (finish.record["prompt_tokens"], finish.record["generated_tokens"], finish.record["expected_tokens"]) == (
        20,
        2,
        21,
    )
    assert (held, answer) == (False, {"hidden_states_last_chunk": finish.refs[-1].chunk_hash})


def test_the_reply_names_no_chunk_where_lmcaches_server_names_them() -> None:
    rig = Rig(20, mp_server_url="tcp://127.0.0.1:5555")
    rig.start([9, 4, 2], 20)
    rig.sample(1)
    assert rig.half.finish(rig.request, [9, 4, 2]) == (False, None)
    assert [chunk.ref.end for chunk in rig.given[0].ready] == [20]


def test_an_aborted_request_leaves_what_was_computed_and_its_file_is_given_up() -> None:
    rig = Rig(40, emit="both", shared_storage_path="/files")
    step = rig.start([9, 4, 7], 20)
    assert step.new_files == {"r": "/files/r.safetensors"}
    rig.request.get_finished_reason = lambda: "abort"
    rig.half.finish(rig.request, [9, 4, 7])
    (finish,) = rig.given
    assert [chunk.ref.end for chunk in finish.ready] == [20]
    assert finish.file is not None
    assert finish.file.problem == ""


def test_a_request_that_was_never_scheduled_leaves_nothing() -> None:
    rig = Rig(40, emit="both")
    assert rig.half.finish(rig.request, []) == (False, None)
    rig.half.allocated(rig.request)  # it waited for KV from elsewhere
    assert rig.half.finish(rig.request, []) == (False, None)
    assert rig.given == []


def test_blocks_whose_kv_another_connector_loads_are_named() -> None:
    rig = Rig(40)
    step = rig.start([9, 4, 7, 1, 5], 8, local=8, computed=32)
    assert step.foreign == [4, 7, 1]
    assert step.written == [(5, True)]


def test_a_preempted_request_goes_on_with_its_new_blocks_where_its_chunks_ended() -> None:
    rig = Rig(40)
    assert ends(rig.start([9, 4, 7], 20)) == [16]
    rig.request.num_computed_tokens = 0
    step = rig.start([3, 2, 6, 8, 1], 40)
    assert [(chunk.ref.start, chunk.blocks) for chunk in step.ready] == [(16, [6, 8])]


def test_the_rows_of_a_preempted_requests_open_chunk_are_taken_before_its_blocks_are_written_anew() -> None:
    rig = Rig(40)
    rig.start([9, 4, 7], 21)
    step = rig.preempt()
    assert [(chunk.ref.start, chunk.ref.end, chunk.blocks) for chunk in step.open_chunks] == [(16, 21, [7])]
    assert step.ready == []


def test_a_request_that_is_aborted_while_it_is_preempted_keeps_the_rows_that_were_computed() -> None:
    rig = Rig(40)
    rig.start([9, 4, 7], 21)
    (open_chunk,) = rig.preempt().open_chunks
    rig.request.get_finished_reason = lambda: "abort"
    _, answer = rig.half.finish(rig.request, [])
    (finish,) = rig.given
    assert [ref.end for ref in finish.refs] == [16, 21]
    assert finish.ready == [open_chunk._replace(blocks=[])]  # taken already
    assert finish.record is not None
    assert finish.record["expected_tokens"] == 21
    assert answer == {"hidden_states_last_chunk": open_chunk.ref.chunk_hash}


def test_a_preempted_request_that_has_gone_on_ends_like_any_other() -> None:
    for computed_again, last in ((18, 21), (24, 24), (40, 39)):
        rig = Rig(40)
        rig.start([9, 4, 7], 21)
        rig.preempt()
        rig.start([3, 2, 6, 8, 1], computed_again)
        rig.half.finish(rig.request, [3, 2, 6, 8, 1])
        (finish,) = rig.given
        assert finish.refs[-1].end == last
        assert bool(finish.ready[-1].blocks) == (last > 21)


def test_requests_with_embeddings_or_an_adapter_go_to_no_tier_and_their_answer_says_so() -> None:
    for change, reason in (({"prompt_embeds": object()}, "embeddings"), ({"lora_request": object()}, "LoRA adapter")):
        rig = Rig(40)
        vars(rig.request).update(change)
        assert rig.start([9, 4, 7, 1, 5], 40).ready == []
        _, answer = rig.half.finish(rig.request, [9, 4, 7, 1, 5])
        assert answer is not None
        assert answer.keys() == {"hidden_states_not_covered"}
        assert reason in answer["hidden_states_not_covered"]


def test_what_lmcache_names_chunks_after_is_told_when_a_request_starts() -> None:
    rig = Rig(40)
    rig.request.kv_transfer_params = {"lmcache.tag.user": "a", "include_output_tokens": True}
    place = SimpleNamespace(offset=20, length=4)
    rig.request.mm_features = [SimpleNamespace(identifier="cat", mm_position=place)]
    assert rig.start([9, 4, 7], 20).named == {"r": KeyInputs({"lmcache.tag.user": "a"}, 20)}
    assert rig.step(20, [1, 5]).named == {}
    assert Rig(40).start([9, 4, 7], 20).named == {}


def test_blocks_into_which_another_connector_loads_when_a_request_is_aborted_hold_no_rows() -> None:
    rig = Rig(100)
    rig.start([0], 8)
    rig.preempt()  # its eight rows are taken
    rig.half.found_locally(rig.request, 0)
    rig.half.allocated(rig.request)
    rig.request.num_computed_tokens = 64  # what vLLM says while another connector's KV is on its way
    rig.half.finish(rig.request, [2, 3, 4, 5, 6, 7, 8, 9])
    (finish,) = rig.given
    assert [(chunk.ref.end, chunk.blocks) for chunk in finish.ready] == [(8, [])]
    assert finish.record is not None
    assert finish.record["expected_tokens"] == 8


def test_no_open_chunk_is_taken_from_a_cache_that_was_given_away() -> None:
    rig = Rig(40)
    assert ends(rig.start([9, 4, 7], 21)) == [16]
    rig.half.reset()  # sleep: every request is preempted, and the memory goes before the next step tells of it
    assert rig.preempt().open_chunks == []
    rig.half.found_locally(rig.request, 0)
    rig.half.allocated(rig.request)
    assert ends(rig.step(40, new=[SimpleNamespace(req_id="r", block_ids=([1, 2, 3, 5, 6],))])) == [32], "computed again"


def test_an_image_that_a_session_brings_later_is_part_of_the_names_from_there_on() -> None:
    names = []
    for image in ("cat", "dog"):
        rig = Rig(20)
        rig.start([1, 2, 3], 20)
        rig.ids += [7] * 40
        rig.request.num_tokens = rig.request.num_prompt_tokens = 60
        position = SimpleNamespace(offset=30, length=20)
        rig.request.mm_features.append(SimpleNamespace(identifier=image, mm_position=position))
        rig.half.allocated(rig.request)
        step = rig.step(40, new=[SimpleNamespace(req_id="r", block_ids=([1, 2, 3, 4, 5, 6, 7, 8],))])
        names.append([chunk.ref.chunk_hash for chunk in step.ready])
    assert set(names[0]).isdisjoint(names[1])


def test_when_the_cache_goes_before_an_end_has_reached_the_worker_its_last_rows_are_given_up(tmp_path: Path) -> None:
    rig = Rig(40, emit="both", shared_storage_path=str(tmp_path))
    rig.half._finish_here = lambda finish: None  # the worker is in another process
    rig.start([9, 4, 7, 1, 5], 40)
    rig.sample(7)
    needed, _ = rig.half.finish(rig.request, [9, 4, 7, 1, 5])
    assert needed
    rig.half.reset()
    (finish,) = rig.step(0, new=[]).finished
    assert finish.ready == []
    assert [(ref.start, ref.end) for ref in finish.refs] == [(0, 16), (16, 32)]
    assert finish.file is not None
    assert "gave the cache away" in str(finish.file.problem)
