"""Settings of the file format that this version does not act on yet: said at the start, never passed over. Pure."""

from __future__ import annotations

from llamarack.config import Deployment, Supervise


def unbuilt_settings(deployment: Deployment) -> list[str]:
    """One sentence for each such setting that differs from its default."""
    defaults = Supervise()
    return [
        f"supervise.{name} is not acted on yet"
        for name in ("sample_s", "webhook")
        if getattr(deployment.supervise, name) != getattr(defaults, name)
    ]
