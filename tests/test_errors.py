"""The table in the docstring of `errors` is the contract; the classes must agree with it."""

import inspect
import re

from llamarack import errors

ROW = re.compile(r"^[ |`-]*(\w+)\s+exit (\d+)\s+HTTP (\d\w\w)\b", re.MULTILINE)


def test_docstring_table_names_the_classes_with_their_codes() -> None:
    documented = {name: (exit_code, http) for name, exit_code, http in ROW.findall(errors.__doc__ or "")}
    classes = {
        name: item
        for name, item in inspect.getmembers(errors, inspect.isclass)
        if issubclass(item, errors.LlamarackError)
    }
    assert documented.keys() == classes.keys()
    for name, (exit_code, http) in documented.items():
        assert classes[name].exit_code == int(exit_code), name
        if http != "4xx":
            assert classes[name].http_status == int(http), name


def test_codes_are_distinct() -> None:
    # BadRequest is RequestError's own meaning under a name that says so.
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.LlamarackError)]
    codes = [c.code for c in classes if c is not errors.BadRequest]
    assert len(codes) == len(set(codes))
