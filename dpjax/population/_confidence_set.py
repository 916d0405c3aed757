"""`confidence_set`: confidence sets for a population from simulated releases, without a prior."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax._core import _checks
from dpjax._core._open_ledgers import untold_programs
from dpjax._core._types import Database, Key, PyTree, Value
from dpjax._core._values import Release
from dpjax.population._laws import Law, OneOrSeveral, Releases, as_several, check_distinct, fits
from dpjax.population._posterior import tree_of
from dpjax.population._search import MOST_DIMS, Search, margins, p_value
from dpjax.population._world import Model, NumberOfRecords, Population
from dpjax.random._keys import check_key, sampling_key, seeded_key
from dpjax.release._privatize import PrivateFunction

# The number of parameters in a block, and the largest number of blocks in one call.
_BLOCK, _BLOCKS = 4, 64
_LEAST_SEEDS = 19


@dataclasses.dataclass(frozen=True, eq=False)
class Simulation:
    """Simulates releases of databases, under seeds that are the same for all parameters.

    Attributes:
        privates: the private functions.
        draws: for each private function, a function `draw(key, database)` that draws the value of a
            release.
        population: draws databases.
        statistic: computes the compared numbers from the values of the releases.
        seeds: the number of simulated releases.
        like: shapes and dtypes of theta, a pytree.
    """

    privates: tuple[Releases, ...]
    draws: tuple[Callable[[Key, Database], Value], ...]
    population: Population
    statistic: Callable[[Any], PyTree]
    seeds: int
    like: PyTree

    def p_value(self, key: Key, theta: PyTree, observed: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the p-value of the parameters theta, and its `margins`.

        From the margins at a few parameters, a `Search` bounds the p-values between them.
        """

        def simulated(seed: jax.Array) -> jax.Array:
            of_database, *of_noise = jax.random.split(
                jax.random.fold_in(key, seed), 1 + len(self.draws)
            )
            database = self.population.database(sampling_key(of_database), theta)
            drawn = zip(self.draws, of_noise, strict=True)
            return self.numbers([draw(one, database) for draw, one in drawn])

        releases = jax.vmap(simulated)(jnp.arange(self.seeds))
        return p_value(observed, releases), margins(observed, releases)

    def numbers(self, values: Sequence[Value]) -> jax.Array:
        """Returns the statistic of the values of releases, as one vector of floats."""
        value = values[0] if len(self.draws) == 1 else list(values)
        leaves = jax.tree.leaves(_checks.real_arrays("statistic", self.statistic(value)))
        dtype = jnp.result_type(float)
        return jnp.concatenate([jnp.ravel(leaf).astype(dtype) for leaf in leaves])

    @functools.cached_property
    def evaluate(self) -> Any:
        """Returns a compiled function that computes the p-values and margins of many parameters.

        The parameters are an array of shape (blocks, parameters in a block, numbers). The function
        computes as many blocks as its last argument says, and returns 0 for the other blocks.
        """

        def of_one(theta: jax.Array, key: Key, observed: jax.Array) -> tuple[jax.Array, jax.Array]:
            return self.p_value(key, tree_of(theta, self.like), observed)

        def of_all(
            key: Key, observed: jax.Array, thetas: jax.Array, blocks: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            def step(i: jax.Array, found: Any) -> Any:
                # Every theta gets its own copy of the key, because a mechanism refuses a batch of
                # values with one unbatched key. Reusing a key would endanger real releases. Here no
                # value is private, so reusing the key is harmless.
                keys = jnp.broadcast_to(key, thetas.shape[1:2])
                new = jax.vmap(of_one, (0, 0, None))(thetas[i], keys, observed)
                return jax.tree.map(lambda whole, part: whole.at[i].set(part), found, new)

            several = len(observed) if len(observed) > 1 else 0
            nothing = jnp.zeros(thetas.shape[:2], observed.dtype)
            no_margins = jnp.zeros((*thetas.shape[:2], several + self.seeds), observed.dtype)
            return lax.fori_loop(0, blocks, step, (nothing, no_margins))

        return jax.jit(of_all)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ConfidenceSet:
    """The parameters of a population that a release does not exclude.

    Made by `dpjax.confidence_set`. It searches only when `interval` or a similar method is called.

    Attributes:
        confidence: the least probability that the set contains the true parameters.
        bounds: the lower ends and the upper ends of the parameters that are searched.
        seeds: the number of simulated releases for each theta.

    Formal guarantees:
        See `dpjax.confidence_set`.
    """

    confidence: float
    bounds: tuple[PyTree, PyTree]
    seeds: int
    _simulation: Simulation
    _key: Key
    _observed: jax.Array

    @property
    def _alpha(self) -> float:
        return round(1 - self.confidence, 12)  # For a confidence of 0.95, this is 0.05.

    @functools.cached_property
    def _ends(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the lower and the upper bounds of parameters as vectors of numbers."""
        low, high = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(e)]) for e in self.bounds)
        return low, high

    def _p_values(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the p-values and the margins of rows of parameters."""
        found: list[tuple[np.ndarray, np.ndarray]] = []
        for start in range(0, len(rows), _BLOCK * _BLOCKS):
            part = rows[start : start + _BLOCK * _BLOCKS]
            padded = np.resize(part, (_BLOCKS, _BLOCK, rows.shape[1])).astype(self._observed.dtype)
            blocks = jnp.asarray(-(-len(part) // _BLOCK), jnp.int32)
            both = self._simulation.evaluate(self._key, self._observed, jnp.asarray(padded), blocks)
            p, margins = (np.asarray(x).reshape(-1, *x.shape[2:])[: len(part)] for x in both)
            p = np.round(p.astype(np.float64) * (self.seeds + 1)) / (self.seeds + 1)
            found.append((p, margins))
        p_values, every = map(np.concatenate, zip(*found, strict=True))
        return p_values, every

    def _search(self, free: np.ndarray, fixed: np.ndarray) -> Search:
        """Returns a search over the parameters where `free` is true; others have values `fixed`.

        The search is over a unit cube, to which the bounds of the free parameters are mapped.
        """
        low, high = (end[free] for end in self._ends)

        def evaluate(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            rows = np.tile(fixed, (len(points), 1))
            rows[:, free] = low + points * (high - low)
            return self._p_values(rows)

        dims = int(free.sum())
        if dims > MOST_DIMS:
            raise ValueError(
                f"a search must have at most {MOST_DIMS} parameters, got {dims}: fix the others, or"
                " call contains(theta) and p_value(theta) with a number for every parameter"
            )
        return Search(evaluate, self._alpha, dims, len(self._observed))

    def p_value(self, theta: PyTree) -> float:
        """The p-value of the hypothesis that the population has these parameters.

        Args:
            theta: a pytree like the bounds. A parameter that is None is a nuisance parameter: it
                may have any value within the bounds, and the result is the largest p-value.

        Returns:
            A multiple of 1 / (seeds + 1). With nuisance parameters, it is an upper bound of the
            largest p-value. To find this bound, a search splits the range of these parameters into
            cells, as for `interval`.

        Raises:
            TypeError: if a parameter is not a number.
            ValueError: if theta is not like the bounds, or has more than 6 nuisance parameters.
        """
        fixed, free = self._read(theta)
        if not free.any():
            return float(self._p_values(fixed[None])[0][0])
        return self._search(free, fixed).largest()

    def contains(self, theta: PyTree) -> bool:
        """Whether parameters belong to the set.

        Args:
            theta: a pytree like the bounds; None for a nuisance parameter, as in `p_value`.

        Returns:
            Whether the p-value is above 1 - confidence.

        Raises:
            TypeError: if a parameter is not a number.
            ValueError: if theta is not like the bounds.
        """
        return self.p_value(theta) > self._alpha

    def given(self, key: Key, release: Release | Value | Sequence[Release]) -> "ConfidenceSet":
        """The confidence set for another release of the same private function.

        Nothing is compiled again.

        Args:
            key: a typed key of `dpjax.random`, used for nothing else; it makes new seeds.
            release: a `Release`, or its value; or a list of several releases.

        Returns:
            A `ConfidenceSet`.

        Raises:
            TypeError: if the key is not one of `dpjax.random`.
            ValueError: if the release is not like a simulated one.
        """
        observed = _observed(self._simulation, release)
        return dataclasses.replace(self, _key=check_key(key), _observed=observed)

    @functools.cached_property
    def _searched(self) -> tuple[Search, tuple[np.ndarray, np.ndarray]]:
        low, _ = self._ends
        search = self._search(np.ones(low.shape, bool), low)
        return search, search.ends()

    def interval(self) -> tuple[PyTree, PyTree]:
        """The range of every parameter over the set, within the bounds.

        All ranges are valid at once: with probability `confidence` they contain the true
        parameters.

        Returns:
            The lower ends and the upper ends, float64, each with the structure of theta.

        Raises:
            ValueError: if no parameters within the bounds belong to the set, because the bounds or
                the model do not fit the release; or if there are more than 6 parameters.

        Formal guarantees:
            The bounds are cut into cells, and the range of all cells that are not left out is
            returned. A cell is left out only if no numbers near those at its places would give a
            p-value above 1 - confidence. Its places are the corners, the middle, and the middles of
            edges and faces. For releases of one number, the compared numbers are the sorted
            differences between the simulated releases and the observed one. For several, they are
            the differences between the observed release and the mean of the simulated ones,
            standardized by their covariance, and the sorted lengths of simulated ones. Near means
            between the least and the largest value at the places, or beyond by half of this range.

            So the range contains the whole set, also parts that are not connected, if inside each
            cell no such number leaves this enlarged range. For one parameter, it suffices that each
            number increases, decreases or is quadratic in theta in each cell; there are 32 first
            cells. If a model bends more often, narrower bounds make the cells smaller.

            Cells at the ends are halved until an end is within 1/256 of the range (one parameter:
            2^-16) of a point that belongs, or after 3,000 points. After that, the remaining cells
            are kept, so that with more than three parameters the range is too wide rather than too
            narrow. For several released numbers, the bound of a p-value makes the range wider by
            about 5 / (seeds + 1) of its width.
        """
        search, (low, high) = self._searched
        if np.isnan(low).any():
            raise ValueError(
                "no parameters within the bounds belong to the confidence set: the largest p-value"
                f" was {search.p_values.max():.3g}. The bounds are too narrow, or the model does"
                " not fit the release"
            )
        first, last = self._ends
        low, high = (tree_of(first + x * (last - first), self.bounds[0]) for x in (low, high))
        return low, high

    def searched(self) -> tuple[PyTree, np.ndarray]:
        """All parameters that the search of `interval` evaluated, for a plot.

        Returns:
            Parameters with a leading axis, and their p-values.
        """
        search, _ = self._searched
        low, high = self._ends
        rows = low + search.points * (high - low)
        trees = [tree_of(row, self.bounds[0]) for row in rows]
        return jax.tree.map(lambda *x: np.stack(x), *trees), search.p_values

    def _read(self, theta: PyTree) -> tuple[np.ndarray, np.ndarray]:
        """Converts theta to a vector of numbers, and returns which are nuisance parameters."""
        leaves, structure = jax.tree.flatten(theta, is_leaf=lambda node: node is None)
        wanted, of_bounds = jax.tree.flatten(self.bounds[0])
        likes = structure == of_bounds and all(
            leaf is None or np.shape(leaf) == np.shape(x)
            for leaf, x in zip(leaves, wanted, strict=True)
        )
        if not likes:
            raise ValueError(
                f"theta must be like the bounds, {_checks.described(self.bounds[0])}, got"
                f" {_checks.shown(theta)}"
            )
        row = np.concatenate(
            [
                np.full(np.size(x), np.nan) if leaf is None else np.ravel(_number("theta", leaf))
                for leaf, x in zip(leaves, wanted, strict=True)
            ]
        )
        return row, np.isnan(row)

    def __repr__(self) -> str:
        text = f"{self.confidence:.0%}, {self.seeds} seeds"
        if "_searched" not in vars(self):
            return f"ConfidenceSet({text}; not searched yet, see interval)"
        if np.isnan(self._searched[1][0]).any():
            return f"ConfidenceSet({text}; empty within the bounds)"
        low, high = self.interval()
        paths = jax.tree_util.tree_leaves_with_path(low)
        named = [
            f"{jax.tree_util.keystr(path, simple=True, separator='.') or 'theta'} in"
            f" [{np.array2string(a, precision=4)}, {np.array2string(b, precision=4)}]"
            for (path, a), b in zip(paths, jax.tree.leaves(high), strict=True)
        ]
        return f"ConfidenceSet({', '.join(named)}; {text})"


def confidence_set(
    key: Key,
    release: Release | Value | Sequence[Release],
    private: OneOrSeveral,
    *,
    model: Model,
    n: NumberOfRecords,
    bounds: tuple[PyTree, PyTree],
    capacity: int | None = None,
    confidence: float = 0.95,
    seeds: int = 199,
    statistic: Callable[[Any], PyTree] | None = None,
) -> ConfidenceSet:
    """The set of population parameters that are consistent with a release. It needs no prior.

    Each parameter theta is tested by simulation: R databases are drawn from a population with
    theta, and `private` makes one release of each. If theta is true, the observed release and the
    simulated releases are R + 1 exchangeable releases. So theta is excluded if the observed release
    is among the least central alpha (R + 1) of them, with alpha = 1 - confidence.

    Args:
        key: a typed key of `dpjax.random`, used for nothing else. It makes the seeds.
        release: a `Release`, or its value; or a list of several releases about one database.
        private: the function that made the release: any `private(key, database)` that returns a
            `Release`, such as the result of `dpjax.privatize`, or of
            `learning.objective_perturbation`, or `functools.partial(queries.private_mean, lower=0,
            upper=1, epsilon=1.0)`; or a list.
        model: `model(key, theta, n)` draws n records of a population. For a fixed key it should be
            smooth in theta, so that a search finds the ends of the set with few evaluations.
        n: the number of records. If it is private, a function that computes it from theta.
        bounds: the lower ends and the upper ends of theta, two pytrees of numbers.
        capacity: the public number of slots, if the release took `PaddedRecords`.
        confidence: the probability that the set contains the true theta, in (0, 1).
        seeds: R, at least 19. More seeds make the set a little smaller, and take longer.
        statistic: computes the numbers to compare from the value of a release, or from the list of
            values. By default all numbers of the release are compared.

    Returns:
        A `ConfidenceSet`.

    Raises:
        TypeError: if the key is not one of `dpjax.random`, or `private`, model or statistic is not
            a function.
        ValueError: if a size is out of range, the bounds are not increasing finite numbers, or the
            release is not like a simulated one. Also if (seeds + 1) (1 - confidence) is below 1,
            because every theta would then belong to the set.

    Formal guarantees:
        Post-processing: no private database is read. Let the database be drawn from `model(.,
        theta, n)`, and the release from `private`. Then the set contains theta with probability at
        least `confidence`, over database, noise and key together, for every n, target and
        mechanism. This includes the bias of clamping, NaN and failures. The reason: under theta,
        the observed and the R simulated releases are exchangeable. The p-value is the fraction of
        releases that are no more central than the observed one. It is at most alpha with
        probability at most floor(alpha (R + 1)) / (R + 1). The key must be independent of the
        release. Apart from rounding, the depths do not depend on which of the R + 1 releases is the
        observed one. `contains` and `p_value` are exact if there are no nuisance parameters.
        Otherwise, and for `interval`, whole cells of parameters are kept, as its docstring says.

    Source:
        Xie and Wang (2022), "Repro Samples Method for Finite- and Large-Sample Inferences"; Awan
        and Wang (2023), "Simulation-based, Finite-sample Inference for Privatized Data".

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import dpjax
        >>> private = dpjax.privatize(jnp.mean, dpjax.laplace(1 / 100, epsilon=1.0))
        >>> found = dpjax.confidence_set(
        ...     dpjax.random.seeded_key(0),
        ...     jnp.array(0.3),
        ...     private,
        ...     model=lambda key, share, n: jnp.where(
        ...         jax.random.uniform(key, (n,)) < share, 1.0, 0.0
        ...     ),
        ...     n=100,
        ...     bounds=(0.0, 1.0),
        ... )
        >>> found.contains(0.3), found.contains(0.6)
        (True, False)
    """
    key = check_key(key)
    _checks.host_only("confidence_set", key, "the draws of your own model")
    population = Population.of(model, n, capacity)
    confidence = _checks.fraction("confidence", confidence)
    seeds = _checks.integer("seeds", seeds, least=_LEAST_SEEDS)
    if (seeds + 1) * (1 - confidence) < 1 - 1e-9:
        raise ValueError(
            f"seeds must be at least {int(np.ceil(1 / (1 - confidence))) - 1} for a confidence of"
            f" {confidence:g}, got {seeds}"
        )
    ends = _bounds(bounds)
    privates = as_several(private)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.result_type(float)), ends[0])
    spec = jax.eval_shape(sampling_key, key)
    draws = tuple(_draw_of(one, key, population, spec, like) for one in privates)
    statistic = _checks.function("statistic", statistic or (lambda value: value))
    simulation = Simulation(privates, draws, population, statistic, seeds, like)
    observed = _observed(simulation, release)
    return ConfidenceSet(confidence, ends, seeds, simulation, key, observed)


def _draw_of(
    private: Any, key: Key, population: Population, spec: Any, theta: PyTree
) -> Callable[[Key, Database], Value]:
    """Returns the JAX function by which a private function draws the value of a release."""
    if isinstance(private, PrivateFunction):
        law = Law.of(private, key, population.database, spec, theta)
        return lambda key, database: law.draw(key, law.exact(database))

    def draw(key: Key, database: Database) -> Value:
        with untold_programs():
            return private(key, database).value

    return draw


def _observed(simulation: Simulation, release: Any) -> jax.Array:
    """Returns the statistic of the observed release, after checking the release's structure."""
    values = list(release) if len(simulation.draws) > 1 else [release]

    def simulated(key: Key, theta: PyTree) -> list[Value]:
        database = simulation.population.database(sampling_key(key), theta)
        return [draw(key, database) for draw in simulation.draws]

    wanted = jax.eval_shape(simulated, jax.eval_shape(lambda: seeded_key(0)), simulation.like)
    given = [x.value if isinstance(x, Release) else x for x in values]
    given = jax.tree.map(lambda x: _checks.host_numbers("release", x), given)
    check_distinct(simulation.privates, values)
    leaves = zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=False)
    alike = jax.tree.map(np.shape, given) == jax.tree.map(jnp.shape, wanted)
    if not alike or not all(fits(x, like.dtype) for x, like in leaves):
        raise ValueError(
            "release must be like the private function's releases: the structure, shapes and dtypes"
            f" must be {_checks.described(wanted)}, got {_checks.described(given)}"
        )
    as_drawn = jax.tree.map(lambda x, like: jnp.asarray(x.astype(like.dtype)), given, wanted)
    return simulation.numbers(as_drawn)


def _bounds(bounds: Any) -> tuple[PyTree, PyTree]:
    wanted = "bounds must be the low ends and the high ends of theta, two trees of finite numbers"
    if not isinstance(bounds, (list, tuple)) or len(bounds) != 2:
        raise ValueError(f"{wanted}, got {_checks.shown(bounds)}")
    low, high = (jax.tree.map(lambda x: _number("bounds", x), end) for end in bounds)
    if jax.tree.map(np.shape, low) != jax.tree.map(np.shape, high):
        raise ValueError(f"{wanted} of one structure, got {_checks.shown(bounds)}")
    for a, b in zip(jax.tree.leaves(low), jax.tree.leaves(high), strict=True):
        if not (np.isfinite(a).all() and np.isfinite(b).all() and (a < b).all()):
            raise ValueError(f"{wanted}, each low end below its high end, got {bounds!r:.200}")
    return low, high


def _number(name: str, value: Any) -> np.ndarray:
    return _checks.host_numbers(name, value).astype(np.float64)
