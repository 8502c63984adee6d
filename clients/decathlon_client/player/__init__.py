"""The full-screen player: a person plays a task in the terminal. Needs the extra `play`.

`session` owns the episode; `form_schema` and `form_values` turn JSON schemas into forms and forms into
arguments; both are independent of the screen. The other modules are Textual screens and widgets.
"""
