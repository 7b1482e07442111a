"""`python -m linvit` imports all of linvit before its command: let Ctrl-C meanwhile end it without a traceback."""

import sys

if sys.argv[:1] == ["-m"] and ("-m", "linvit") in zip(sys.orig_argv, sys.orig_argv[1:], strict=False):
    import linvit_command

    linvit_command.leave_on_interrupt()
