"""Signatures: the tables of arguments in CONTRIBUTING.md, and the glossary beside them."""

import ast
import inspect
import re
import typing
from pathlib import Path

import dpjax
from tables import for_each

PAGE = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
ROOMS = (dpjax, *(value for value in vars(dpjax).values() if inspect.ismodule(value)))
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def rows(first):
    """The rows of the table whose first column has this title."""
    (table,) = (text for text in PAGE.split("\n\n") if text.startswith(f"| {first} |"))
    return [re.split(r" ?\| ?", line.strip("| ")) for line in table.splitlines()[2:]]


def quoted(text):
    return re.findall(r"`([^`]+)`", text)


def public():
    """Public functions, and public methods of public classes, by name."""
    found = {}
    for room in ROOMS:
        folder = room.__name__.removeprefix("dpjax").removeprefix(".")
        for name, value in vars(room).items():
            if name.startswith("_") or not getattr(value, "__module__", "").startswith("dpjax"):
                continue
            name = f"{folder}.{name}".strip(".")
            if inspect.isfunction(value):
                found[name] = value
            elif inspect.isclass(value):
                for method, code in inspect.getmembers(value, inspect.isfunction):
                    if method == "__call__" or not method.startswith("_"):
                        found[f"{name}.{method}"] = code
    return found


PUBLIC = public()


def parameters(name):
    """The parameters of a function, without `self`."""
    found = inspect.signature(PUBLIC[name]).parameters.values()
    return [parameter for parameter in found if parameter.name != "self"]


def takes(argument):
    """Functions and methods with such an argument: its place from 1, or 0 by keyword; default."""
    for name in PUBLIC:
        for place, parameter in enumerate(parameters(name), 1):
            if parameter.name == argument:
                yield name, place * (parameter.kind in POSITIONAL), parameter.default


ARGUMENTS = [(argument, *row[1:]) for row in rows("Argument") for argument in quoted(row[0])]
PLACES = {"first": {1}, "first, or after `key`": {1, 2}, "third": {3}, "by keyword": {0}}


@for_each("row", ARGUMENTS)
def test_an_argument_is_given_in_one_way_and_has_one_default(row):
    argument, given, default, _, *exceptions = row
    exceptions = set(quoted(" ".join(exceptions)))
    found = {name: (place, value) for name, place, value in takes(argument)}
    assert found
    assert exceptions <= set(PUBLIC)
    wrong = {x for x, (place, _) in found.items() if place not in PLACES[given]}
    if default == "none":
        wrong |= {x for x, (_, value) in found.items() if value is not inspect.Parameter.empty}
    elif quoted(default) and argument != "confidence":
        expected = ast.literal_eval(quoted(default)[0])
        wrong |= {x for x, (_, value) in found.items() if value != expected}
    assert wrong <= exceptions, {x: found[x] for x in wrong - exceptions}


def tables_by_function():
    """The tables of `confidence` and of `method`: what they say of each function."""
    tables = []
    for title in ("`confidence`", "`method`; the default comes first"):
        (text,) = (x for x in PAGE.split("\n\n") if x.startswith(f"| Function | {title} |"))
        lines = [re.split(r" ?\| ?", line.strip("| ")) for line in text.splitlines()[2:]]
        tables.append({name: quoted(line[1]) for line in lines for name in quoted(line[0])})
    return tables


CONFIDENCES, METHODS = tables_by_function()


def test_confidence_has_one_default_where_nothing_else_is_said():
    found = {name: default for name, _, default in takes("confidence")}
    assert set(CONFIDENCES) <= set(found)
    required = {name for name, default in found.items() if default is inspect.Parameter.empty}
    assert not required
    said = {name: ast.literal_eval(CONFIDENCES.get(name, ["0.95"])[0]) for name in found}
    assert found == said


def test_methods_are_those_of_the_table():
    found = {name: default for name, _, default in takes("method")}
    assert set(METHODS) == set(found)
    for name, texts in METHODS.items():
        words = [ast.literal_eval(text) for text in texts]
        annotated = inspect.signature(PUBLIC[name]).parameters["method"].annotation
        assert (words[0], set(words)) == (found[name], set(typing.get_args(annotated))), name


def test_at_most_three_arguments_are_given_by_position():
    counts = {
        name: sum(parameter.kind in POSITIONAL for parameter in parameters(name))
        for name, value in PUBLIC.items()
        if "." not in value.__qualname__
    }
    assert {name for name, count in counts.items() if count > 3} == set()


def test_sensitivity_epsilon_and_delta_stand_in_this_order():
    order = ["sensitivity", "epsilon", "delta"]
    for name in PUBLIC:
        given = [x.name for x in parameters(name) if x.kind in POSITIONAL and x.name in order]
        assert given == [word for word in order if word in given], name


def test_a_word_has_one_line():
    words = [row[0] for row in rows("Word")]
    assert words == sorted(set(words))
    assert all(row[1] and len(row) == 2 for row in rows("Word"))
