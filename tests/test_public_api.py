"""The public surface: names, signatures and docstrings, whose examples run."""

import collections.abc
import dataclasses
import doctest
import enum
import inspect
import re
import runpy
import typing
from pathlib import Path

import pytest

import dpjax
from tables import for_each

NAMESPACES = (
    dpjax,
    dpjax.accounting,
    dpjax.attacks,
    dpjax.auditing,
    dpjax.learning,
    dpjax.mechanisms,
    dpjax.oracles,
    dpjax.plotting,
    dpjax.proving,
    dpjax.queries,
    dpjax.random,
    dpjax.targets,
)
PUBLIC = {
    f"{namespace.__name__}.{name}": value
    for namespace in NAMESPACES
    for name, value in vars(namespace).items()
    if not name.startswith("_") and not inspect.ismodule(value)
}
FUNCTIONS = {name: value for name, value in PUBLIC.items() if inspect.isfunction(value)}
PROTOCOLS = {name: value for name, value in PUBLIC.items() if getattr(value, "_is_protocol", False)}
CLASSES = {
    name: value
    for name, value in PUBLIC.items()
    if inspect.isclass(value) and name not in PROTOCOLS
}
# Examples that compile for .75 seconds of a processor or longer.
LONG = re.compile(
    r"\.(above_threshold|propose_test_release|smooth_quantile|shaped_gaussian|sweep|rehearse|record_bound|check_oracle|subset_envelope|posterior_sampler"
    r"|membership_trials|audit_curve|check_conformance"
    r"|adaptive_noise|objective_perturbation|private_weighted_majority|class_gaussians|from_density"
    r"|private_(covariance|pca|variance|k_means|linear_regression)|mwem|name_search|select_each|top_k"
    r"|posterior|posterior_widths|simulation_bank|confidence_set|calibration"
    r"|linear_svm|logistic_regression|ridge_regression)$"
)
IN_CI = (pytest.mark.slow, pytest.mark.long)
functions = for_each("name", FUNCTIONS)
classes = for_each("name", CLASSES)
# Parameters that take any text: a claim, a unit, the names of a sweep's dimensions.
FREE_TEXTS = {"version", "unit", "x", "repeat", "privacy_unit"}
FUNCTION_SECTIONS = ["Args", "Returns", "Raises", "Formal guarantees", "Source", "Example"]


def sections(value):
    """Titles and texts of the sections of a docstring, in order."""
    parts = re.split(r"^([A-Z][A-Za-z ]+):\n", inspect.getdoc(value), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def entries(section):
    """The names that a section explains."""
    return re.findall(r"^    \*{0,2}(\w+):", section, flags=re.MULTILINE)


@functions
def test_functions_are_documented(name):
    function = FUNCTIONS[name]
    found, parameters = sections(function), list(inspect.signature(function).parameters)
    assert list(found) == [title for title in FUNCTION_SECTIONS if title != "Args" or parameters]
    assert all(text.strip() for text in found.values())
    assert entries(found.get("Args", "")) == parameters
    first, *rest = inspect.getdoc(function).splitlines()
    assert first.endswith(".")
    assert not rest or rest[0] == ""


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=IN_CI if LONG.search(x) else ()) for x in FUNCTIONS],
)
def test_examples_run(name):
    (test,) = doctest.DocTestFinder(recurse=False).find(FUNCTIONS[name], name, globs={})
    report = []
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append)
    assert results.failed == 0, "".join(report)
    assert results.attempted > 0


def test_the_reference_has_every_public_name_and_no_other():
    docs = Path(__file__).parents[1] / "docs"
    hook = runpy.run_path(str(docs / "reference.py"))
    pages = (docs / "api").glob("*.md")
    text = "\n".join(hook["completed"](page.read_text(), page.stem) for page in pages)
    assert sorted(re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE)) == sorted(PUBLIC)


@classes
def test_classes_are_documented(name):
    cls = CLASSES[name]
    found = sections(cls)
    assert "Formal guarantees" in found
    assert all(text.strip() for text in found.values())
    if issubclass(cls, enum.Enum):
        assert entries(found["Attributes"]) == list(cls.__members__)
    elif dataclasses.is_dataclass(cls):
        fields = {x.name for x in dataclasses.fields(cls) if not x.name.startswith("_")}
        told = entries(found.get("Attributes", ""))
        # Attributes of a base are told there.
        inherited = [x for base in cls.__bases__ for x in getattr(base, "__dataclass_fields__", ())]
        assert len(told) == len(set(told))
        assert fields - set(inherited) <= set(told) <= fields
    else:
        assert "Attributes" in found


@for_each("name", PROTOCOLS)
def test_protocols_document_the_call(name):
    methods = [v for k, v in vars(PROTOCOLS[name]).items() if k == "__call__"]
    assert inspect.getdoc(PROTOCOLS[name])
    assert all(inspect.getdoc(method) for method in methods)


@for_each("namespace", NAMESPACES)
def test_namespaces_are_documented(namespace):
    assert namespace.__doc__.strip()


@functions
def test_words_of_which_few_are_right_are_literals(name):
    found = inspect.signature(FUNCTIONS[name]).parameters
    assert {key for key, parameter in found.items() if parameter.annotation is str} <= FREE_TEXTS


def test_a_type_checker_finds_wrong_words():
    hints = typing.get_type_hints(dpjax.sample_sensitivity)
    assert typing.get_args(hints["positions"]) == ("last", "average", "each")
    names, function = typing.get_args(hints["norm"])
    assert set(typing.get_args(names)) == set(dpjax.sensitivity._norms.NORMS)
    assert typing.get_origin(function) is collections.abc.Callable


def test_nothing_is_public_twice():
    values = [id(value) for value in PUBLIC.values()]
    assert len(set(values)) == len(values)


# The table of names in the design.
SIGNATURES = {
    "operating_point": "* m gamma method confidence",
    "sample_sensitivity": (
        "key target oracle * n norm m gamma method confidence positions chunk_size mesh progress"
        " checkpoint"
    ),
    "sample_distances": "key target oracle * n norm m positions chunk_size mesh",
    "assume_sensitivity": "value * norm n",
    "laplace": "sensitivity epsilon",
    "gaussian": "sensitivity epsilon delta * calibration",
    "exponential": "sensitivity epsilon",
    "permute_and_flip": "sensitivity epsilon",
    "bernstein": "sensitivity epsilon * degree dims order",
    "randomized_response": "epsilon categories",
    "evaluate_on_lattice": "target * degree dims",
    "approximate_bernstein": "function * degree dims order",
    "privatize": "target mechanism",
    "order_statistic": "distances k",
    "sweep": "key function * traced static repeats path progress",
    "random.secure_key": "",
    "random.seeded_key": "seed",
}
DEFAULTS = {
    "operating_point": {"m": None, "gamma": None, "method": "exact"},
    "sample_sensitivity": {
        "m": None,
        "gamma": None,
        "method": "exact",
        "positions": "last",
        "chunk_size": None,
        "mesh": None,
        "progress": False,
        "checkpoint": None,
    },
    "sample_distances": {"positions": "last", "chunk_size": None, "mesh": None},
    "assume_sensitivity": {"n": None},
    "gaussian": {"calibration": "analytic"},
    "bernstein": {"order": 1},
    "randomized_response": {"categories": 2},
    "approximate_bernstein": {"order": 1},
    "sweep": {"traced": {}, "static": {}, "repeats": 1, "path": None, "progress": False},
}


def parameters(name):
    value = dpjax
    for part in name.split("."):
        value = getattr(value, part)
    return inspect.signature(value).parameters


@for_each("name", SIGNATURES)
def test_names_and_signatures_are_those_of_the_design(name):
    positional, _, keyword = SIGNATURES[name].partition("*")
    found = parameters(name)
    kinds = {key: parameter.kind is parameter.KEYWORD_ONLY for key, parameter in found.items()}
    assert [key for key, only in kinds.items() if not only] == positional.split()
    assert set(keyword.split()) <= {key for key, only in kinds.items() if only}
    for key, default in DEFAULTS.get(name, {}).items():
        assert found[key].default == default
    # What has been added to the design is optional.
    added = set(found) - set(positional.split()) - set(keyword.split())
    assert all(found[key].default is not inspect.Parameter.empty for key in added)


@functions
def test_at_most_three_positional_arguments(name):
    kinds = [parameter.kind for parameter in inspect.signature(FUNCTIONS[name]).parameters.values()]
    assert sum(kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in kinds) <= 3


@functions
def test_keys_come_first_and_have_no_default(name):
    found = inspect.signature(FUNCTIONS[name]).parameters
    if "key" in found:
        assert next(iter(found)) == "key"
        assert found["key"].default is inspect.Parameter.empty
    assert "seed" not in found or name == "dpjax.random.seeded_key"


@pytest.mark.parametrize(
    ("cls", "fields"),
    [
        (dpjax.OperatingPoint, "m k gamma rho method confidence"),
        (dpjax.Guarantee, "epsilon delta gamma confidence"),
        (dpjax.Release, "value guarantee"),
        (
            dpjax.Sensitivity,
            "value norm n relation gamma confidence m k method identity chunk_size target records",
        ),
    ],
)
def test_values_have_the_fields_of_the_design(cls, fields):
    assert set(fields.split()) <= {field.name for field in dataclasses.fields(cls)}


def test_importing_allocates_no_arrays(run_python):
    assert run_python("import jax, dpjax; print(len(jax.live_arrays()))") == "0"


def test_importing_imports_nothing_that_only_some_programs_use(run_python):
    found = run_python("import sys, dpjax; print(*sys.modules)").split()
    unused = {"scipy.special", "scipy.stats", "jax.scipy.stats", "optax", "matplotlib", "tqdm"}
    unused |= {"xarray", "pandas"}
    assert "dpjax.targets" in found
    assert unused.isdisjoint(found)
