"""Settings of the file format that this version does not act on yet: said at the start, never passed over. Pure."""

from __future__ import annotations

from llamarack.config import Deployment, Gateway


def unbuilt_settings(deployment: Deployment) -> list[str]:
    """One sentence for each such setting that differs from its default."""
    told = []
    if deployment.gateway.routing != Gateway().routing:
        told.append(f"gateway.routing: {deployment.gateway.routing} is not built yet; least_loaded is used")
    return told
