"""How a command ends: one constant for each meaning, the same in every command.

1 says that something needs a look, whichever of three things it is; a script that has to tell them apart reads
``--format json``. ``docs/reference/inspect.md`` has the table, by command.
"""

from __future__ import annotations

import signal

#: What was asked for is done, and nothing is wrong.
DONE = 0
#: The command could not do what it was asked; one line on standard error says why.
ERROR = 1
#: Something is wrong with what was checked: a file, a configuration.
FINDING = 1
#: Part of what was asked for was left undone: a namespace is in use, a file cannot be deleted, the answer was no.
LEFT = 1
#: The command line cannot be understood.
USAGE = 2
#: Nothing is wrong so far, but the time was over before everything had been checked.
UNFINISHED = 3
#: Ctrl-C.
INTERRUPTED = 128 + signal.SIGINT
#: The reader of a pipe has gone: ``… | head``.
PIPE_CLOSED = 128 + signal.SIGPIPE
