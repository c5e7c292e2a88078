"""Consistency between deployments, regression between results, gates and verdict."""
