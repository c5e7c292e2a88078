"""Model + hardware + load -> memory per card and term, speed, placement, explanation. Pure: no I/O.

- `record`: the records
"""
