"""What this machine has, and is doing now. Reads; changes nothing.

- `machine`: the records
- `host`: processor, memory, cgroup limits
"""
