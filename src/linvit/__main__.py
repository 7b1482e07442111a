"""`python -m linvit`."""

from linvit.cli import main

main()
