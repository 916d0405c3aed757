"""One row for every query, shared by the tests that all of them must pass. A new query is one row.

A row is a query, all records that matter, and how far one record moves the answer: the reach in l1
and the square of that in l2, under replace-one and under add-or-remove-one.
"""

import numpy as np

from dpjax import queries

MATRIX = [[1, 0, 2, 0], [0, 3, -1, 0], [1, 1, 1, 0]]
ATTRIBUTES = {"a": 2, "b": 3, "c": 2}
COLUMNS = dict(zip("abc", np.indices((2, 3, 2)).reshape(3, -1), strict=True))
INTEGERS = np.arange(-2, 8)

CASES = {
    "count": (queries.counting_query(lambda x: x > 2), INTEGERS, (1, 1), (1, 1)),
    "one bucket": (queries.histogram_query(1), INTEGERS, (1, 1), (1, 1)),
    "buckets": (queries.histogram_query(4), INTEGERS, (2, 2), (1, 1)),
    "edges": (
        queries.histogram_query([-1, 0, 2, np.inf]),
        np.float32([-np.inf, -1, -0.5, 0, 1.5, 2, 1e30, np.nan]),
        (2, 2),
        (1, 1),
    ),
    "edges, clipped": (
        queries.histogram_query([-1, 0, 2], outliers="clip"),
        np.float32([-np.inf, -1, -0.5, 0, 1.5, 2, 1e30, np.nan]),
        (2, 2),
        (1, 1),
    ),
    "contingency": (queries.contingency_query(ATTRIBUTES), COLUMNS, (2, 2), (1, 1)),
    "matrix": (queries.linear_workload(MATRIX), INTEGERS, (6, 20), (4, 10)),
    # A record that leaves the range has no column: it moves by all of one.
    "columns nearly alike": (queries.linear_workload([[2, 3], [1, 1]]), INTEGERS, (4, 10), (4, 10)),
    "marginals": (
        queries.marginal_workload(ATTRIBUTES, [("a", "b"), ("c",), ("b", "c", "a")]),
        COLUMNS,
        (6, 6),
        (3, 3),
    ),
}
