"""Run states on disk: complete or absent, checked, the last k kept. Never a pickle.

`manager` folders and tracker, `tree` values with tensors, `state` what a run needs to go on,
`interrupt` the first and the second Ctrl-C.
"""
