"""Queries with a known sensitivity (counts, sums, quantiles), and statistics computed from them."""

from dpjax._core._columns import texts
from dpjax.mechanisms._selection import sum_of_group_maxima
from dpjax.mechanisms._several_selections import SeveralSelections, TopK, select_each, top_k
from dpjax.queries._counts import contingency_query, counting_query, histogram_query
from dpjax.queries._frequencies import Frequencies, frequencies
from dpjax.queries._group_keys import group_keys
from dpjax.queries._groups import GroupedQuery, GroupedScores, by, split_by
from dpjax.queries._k_means import private_k_means
from dpjax.queries._linear_regression import private_linear_regression
from dpjax.queries._moments import private_covariance, private_mean, private_pca, private_variance
from dpjax.queries._mwem import Mwem, MwemTable, mwem
from dpjax.queries._name_search import NameSearch, name_search
from dpjax.queries._padded_records import PaddedRecords, padded_records
from dpjax.queries._people import PeopleQuery, PeopleScores, by_person
from dpjax.queries._private_quantiles import private_quantiles
from dpjax.queries._quantiles import QuantileScores, quantile_scores
from dpjax.queries._query import Query
from dpjax.queries._sums import sum_query
from dpjax.queries._truncation import padded_people
from dpjax.queries._workload import Workload, linear_workload, marginal_workload

__all__ = [
    "Frequencies",
    "GroupedQuery",
    "GroupedScores",
    "Mwem",
    "MwemTable",
    "NameSearch",
    "PaddedRecords",
    "PeopleQuery",
    "PeopleScores",
    "QuantileScores",
    "Query",
    "SeveralSelections",
    "TopK",
    "Workload",
    "by",
    "by_person",
    "contingency_query",
    "counting_query",
    "frequencies",
    "group_keys",
    "histogram_query",
    "linear_workload",
    "marginal_workload",
    "mwem",
    "name_search",
    "padded_people",
    "padded_records",
    "private_covariance",
    "private_k_means",
    "private_linear_regression",
    "private_mean",
    "private_pca",
    "private_quantiles",
    "private_variance",
    "quantile_scores",
    "select_each",
    "split_by",
    "sum_of_group_maxima",
    "sum_query",
    "texts",
    "top_k",
]
