"""Recorded web: a recording proxy for tasks that need the internet, and its recordings.

`addon` runs inside `mitmdump`, a program of its own with an environment of its own. It and the modules that
it imports (such as `session`, `connections` and `recording`) use the standard library only, and the
package mitmproxy. `proxy` is the server's side.
"""
