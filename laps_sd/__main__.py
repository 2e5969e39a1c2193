"""`python -m laps_sd` is `laps-sd`."""

from laps_sd.cli import main

main()
