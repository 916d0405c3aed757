"""Queries of a database whose sensitivity is known: counts, sums, quantiles, the largest."""

from dpjax.queries._counts import contingency_query as contingency_query
from dpjax.queries._counts import counting_query as counting_query
from dpjax.queries._counts import histogram_query as histogram_query
from dpjax.queries._mwem import Mwem as Mwem
from dpjax.queries._mwem import MwemTable as MwemTable
from dpjax.queries._mwem import mwem as mwem
from dpjax.queries._padded_records import PaddedRecords as PaddedRecords
from dpjax.queries._padded_records import padded_records as padded_records
from dpjax.queries._query import Query as Query
from dpjax.queries._workload import Workload as Workload
from dpjax.queries._workload import linear_workload as linear_workload
from dpjax.queries._workload import marginal_workload as marginal_workload
