"""What this machine has, and is doing now. Reads; changes nothing.

- `machine`, `finding`, `evidence`: the records
- `host`: processor, memory, cgroup limits
- `nvml`: NVIDIA's readings as plain values; `cards`: those values as cards; `pci`: cards of any maker
- `detect`: all of it as one `Machine`, bounded in time; `probe`: a question to a child that can be killed
- `loadlock`: one model load at a time on this machine
- `environment`, `visible`, `disk`, `versions`: variables, limits, CUDA_VISIBLE_DEVICES, model disk, engine builds
- `peer`, `functional`, `data/collective.py`: do the cards work, alone and together?
- `check`: from looks to findings, by `rules_driver`, `rules_cards`, `rules_environment`, `rules_disk`,
  `rules_functional`; `summary`: one screen
"""
