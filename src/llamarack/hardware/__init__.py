"""What this machine has, and is doing now. Reads; changes nothing.

- `machine`, `finding`: the records
- `host`: processor, memory, cgroup limits
- `nvml`: NVIDIA's readings as plain values; `cards`: those values as cards; `pci`: cards of any maker
- `detect`: all of it as one `Machine`, bounded in time
"""
