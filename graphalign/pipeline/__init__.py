"""What the commands do, for Python: capture, compare, prove, write. Nothing here prints; what is read or written is named by the caller.

Engines and captures are imported when they run, so that everything else works in a core installation.
"""
