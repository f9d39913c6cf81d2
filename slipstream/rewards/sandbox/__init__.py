"""Running code that a model wrote: on this machine, isolated, or at a service.

Knows programs and their limits, not tests or scores.
"""
