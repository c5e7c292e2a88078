"""One adaptor per engine: options, log lines, metrics, API deviations."""
