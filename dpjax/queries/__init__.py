"""Queries of a database whose sensitivity is known: counts, sums, quantiles, the largest."""

from dpjax.queries._bounded_sums import sum_query as sum_query
from dpjax.queries._counts import contingency_query as contingency_query
from dpjax.queries._counts import counting_query as counting_query
from dpjax.queries._counts import histogram_query as histogram_query
from dpjax.queries._covariance import private_covariance as private_covariance
from dpjax.queries._covariance import private_pca as private_pca
from dpjax.queries._covariance import private_variance as private_variance
from dpjax.queries._k_means import private_k_means as private_k_means
from dpjax.queries._linear_regression import private_linear_regression as private_linear_regression
from dpjax.queries._means import private_mean as private_mean
from dpjax.queries._mwem import Mwem as Mwem
from dpjax.queries._mwem import MwemTable as MwemTable
from dpjax.queries._mwem import mwem as mwem
from dpjax.queries._padded_records import PaddedRecords as PaddedRecords
from dpjax.queries._padded_records import padded_records as padded_records
from dpjax.queries._query import Query as Query
from dpjax.queries._workload import Workload as Workload
from dpjax.queries._workload import linear_workload as linear_workload
from dpjax.queries._workload import marginal_workload as marginal_workload
