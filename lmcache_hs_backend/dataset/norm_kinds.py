"""How the final norm of each model type computes, for where transformers is not installed or does not know the type.

Made from transformers 5.24 by building the model of every text config and looking what its norm does; a test does that
again and compares. The types that transformers does not have are from vLLM 0.32's models. Vision and encoder-decoder
models are left out. A type that stands nowhere here is an error, never a guess.
"""

from __future__ import annotations

#: What a norm computes of a row x: ``rms`` x / rms(x) · weight; ``layer`` (x - mean) / std · weight + bias; ``+1`` the
#: weight is stored less one; ``no-weight`` there is none.
KINDS = ("rms", "rms+1", "rms-no-weight", "layer", "layer+1", "layer-no-weight")

_TYPES = {
    "rms": """
        afmoe apertus apertus1p5_text arcee aria_text axk1 axk2 baichuan bailing_hybrid bailing_moe
        bailing_moe_v2 bamba beam bitnet cosmos3_edge_text cpmant cwm deepseek deepseek_v2 deepseek_v3
        deepseek_v32 deepseek_v4 deepseek_vl_v2 diffllama doge dots1 dots3_note_text embedding_gemma2_text
        emu3_text_model ernie4_5 ernie4_5_moe ernie4_5_vl_moe_text evolla exaone exaone4 exaone_moe falcon_h1
        falcon_mamba flex_olmo flint gemma3n_text gemma4_text gemma4_unified_text glm glm4 glm4_moe
        glm4_moe_lite glm4v_moe_text glm4v_text glm5_next_text glm_image_text glm_moe_dsa glm_ocr_text gpt_oss
        granite granite4_vision_text granite_docling_text granite_swa granitemoe granitemoe_swa granitemoehybrid
        granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hy_v4_vl_text hyperclovax idefics
        inkling2_loop_text inkling2_text inkling_text internlm internlm2 internlm3 iquestcoder jamba jetmoe
        kimi_k2 kimi_linear kolibri1 kyutai_speech_to_text laguna lara_mini lfm2 lfm2_moe lfm3 llama llama4_text
        longcat_flash mamba mamba2 mellum mimo mimo_v2_flash minicpm minicpm3 minimax minimax_m2 ministral
        ministral3 mistral mistral4 mistral_large4_text mixtral mllama_text_model molmo2_text moshi
        muse_glimmer_text muse_spark_text nemotron-nas nemotron_h olmo2 olmo3 olmo_hybrid olmoe
        paddleocr_vl_text param2moe phi3 phi4_multimodal pix2struct_text_model plamo3 qwen qwen2
        qwen2_5_omni_text qwen2_5_vl_text qwen2_moe qwen2_vl_text qwen3 qwen3_moe qwen3_omni_moe_text
        qwen3_vl_moe_text qwen3_vl_text sarvam_mla sarvam_moe seed_oss smollm3 solar_open step3_text telechat2
        udop unlimited_ocr_text voxtral_realtime_text xlstm xverse youtu zamba zamba2 zaya
    """,
    "rms+1": """
        gemma gemma2 gemma3_text minimax_m3_vl_text qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma
        rnj1 step3p5 t5gemma vaultgemma
    """,
    "rms-no-weight": "hrm_text nanochat",
    "layer": """
        bloom codegen cohere cohere2 cohere2_moe dbrx falcon gpt2 gpt_bigcode gpt_neo gpt_neox
        gpt_neox_japanese gptj jais jais2 kosmos_2_5_text_model kosmos_2_text_model modernbert-decoder mpt opt
        orion persimmon phi phimoe rwkv stablelm starcoder2 xglm
    """,
    "layer+1": "nemotron",
    "layer-no-weight": "olmo",
}
#: Model type → kind.
KIND_OF = {name: kind for kind, names in _TYPES.items() for name in names.split()}
