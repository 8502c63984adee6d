"""The full-screen player: a person plays a task in the terminal. Needs the extra `play`.

`session` owns the episode and is independent of the screen; the others are Textual screens and widgets.
"""
