"""`python -m linvit`."""

from linvit_command import main

main()
