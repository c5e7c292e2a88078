"""The front door: admission, routing, relay, wire format, keys, metrics. Owns no processes."""
