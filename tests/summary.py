"""Lines that tests append and the end of the test run prints: what was compared, how much, the largest difference."""

LINES: list[str] = []
