"""Playing a task in a browser. It works without JavaScript: each step is a form, answered by a redirect."""
