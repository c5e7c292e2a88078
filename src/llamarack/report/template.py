"""Pages from the templates beside this package: every value is escaped, and one that is not given is an error."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined


def render(name: str, **values: object) -> str:
    environment = Environment(
        loader=PackageLoader("llamarack.report", "assets"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template(name).render(**values)
