"""Models whose truth is known, and what each localiser reads there."""
