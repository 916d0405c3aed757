"""Defines `PrivateTable`, whose statistics are private and refer to columns by name."""

from dpjax.tables._averages import AveragesOfTable
from dpjax.tables._relations import RelationsOfTable
from dpjax.tables._synthesis import SynthesisOfTable


class PrivateTable(AveragesOfTable, RelationsOfTable, SynthesisOfTable):
    """A table of private rows, and differentially private statistics of its columns.

        with dpjax.Ledger("study.db", epsilon=1.0, delta=1e-6) as ledger:
            table = dpjax.PrivateTable(frame, ledger=ledger, most_rows=100_000)
            table.mean("age", bounds=(18, 90), by={"ward": ["A", "B"]}, epsilon=0.2)

    Arguments that many statistics take:

    - `by`: columns and their public keys, as {"ward": ["A", "B"]}. The statistic is computed for
      every combination of keys. Instead of a list of keys you may pass a release of `keys`. Rows
      with other keys are not counted.
    - `where`: a public predicate on one row, written in JAX, such as `lambda row: row["age"] >=
      18`. Entries of the row are numbers, or texts, dates and times that can be compared with other
      texts, dates and times. A missing number or date is NaN.
    - `epsilon`, or `share`, a fraction of the epsilon of the ledger's budget, or `error`, the
      half-width of the 95% interval of each number: exactly one of them. If you give an error, the
      table computes the least epsilon that reaches it.
    - `delta`: None takes the same fraction of the ledger's delta as of its epsilon. If there is a
      delta, the noise is Gaussian if Gaussian noise is smaller.
    - `per_person="sum"`, in a table with `person`: each person counts once, or once in each group,
      with the sum of their numbers. `bounds` are bounds of these sums, and `mean` is their average,
      over the people with a number. A person changes `sum` by at most the larger bound in
      magnitude, times the number of groups in which they count. Without `per_person`, a person
      changes it by up to `rows` times the bound of a number.
    - `bounds`: public bounds to which numbers are clipped. Choose them by what is possible, not by
      the least and the largest number of this table. For several columns, give a dict.
    - `key`: None draws a key from the operating system; give a key only in tests.

    Args:
        frame: a table of pandas, polars or Arrow, or a dict of columns. Only columns that a
            statistic uses are converted. A table larger than memory may be a source of batches,
            such as a dataset of pyarrow or a LazyFrame of polars; docs/how-to/large-tables.md lists
            them.
        most_rows: a public number that is at least the number of rows of any possible table.
        ledger: the ledger whose budget pays for all statistics; None uses the open ledger, if there
            is one.
        relation: which tables are neighbors. By default one table has one row more than the other,
            and therefore the number of rows is private.
        missing: "drop" leaves out rows with a missing entry in a column of the statistic. "lower"
            replaces a missing number by the lower end of its bounds.
        name: the name of these rows, for a ledger that pays for several tables.
        person: the column of ids, if a person may have several rows: neighbors differ in all rows
            of a person. None protects single rows. A row without an id is not counted.
        rows: how many rows of a person count, public; required with `person`. The first rows among
            those that a statistic asks about count.
        groups: maps a column to the public number of groups of this column in which a person
            counts, in a statistic by this column. In each of these groups, `rows` rows of the
            person count. `count_distinct`, `keys` and `top` count people: a person counts once for
            each of their first different entries, as many as `groups` says of this column, or else
            `rows`.
        order: a column of numbers that orders the rows, the least first. None uses the order of
            the table.

    Attributes:
        most_rows: as given.
        relation: which tables are neighbors.

    Raises:
        TypeError: if the frame is not a table, or an argument has the wrong type.
        ValueError: if there are more rows than `most_rows`, columns differ in length, the ledger is
            under another relation, or the ledger knows another table by this name.

    Formal guarantees:
        Every statistic is (epsilon, delta)-DP under the relation, for the delta that its release
        shows. Whether a row counts, and in which group, depends on that row alone: on its missing
        entries, `where`, and its keys. So an added row moves a statistic by at most the sensitivity
        of its query. Under replace-one the old row may count and the new row not, or the other way
        around; the sensitivity covers that. With `person`, whether a row counts also depends on the
        other rows of the same person, and all rows of a person move a statistic by at most the
        bound in docs/proofs/people.md. Names of columns, dtypes, keys, bounds and predicates are
        public.

        In a ledger each release has a name: the statistic, its columns, and a fingerprint of all
        arguments. The same question, even in a later run of the same program, returns the stored
        release. The name does not depend on the entries of the table: if they change, give the
        ledger another `version`.

    Example:
        >>> import numpy as np
        >>> import dpjax
        >>> frame = {"ward": np.array(["A", "B", "A"] * 900), "age": np.arange(2700) % 50 + 20}
        >>> table = dpjax.PrivateTable(frame, most_rows=10_000)
        >>> counts = table.count(by={"ward": ["A", "B"]}, epsilon=1.0)
        >>> bool(abs(counts.value[0] - 1800) < 30)
        True
    """
