"""Queries of a database whose sensitivity is known: counts, sums, quantiles, the largest."""

from dpjax.queries._frequencies import Frequencies as Frequencies
from dpjax.queries._frequencies import frequencies as frequencies
from dpjax.queries._name_search import NameSearch as NameSearch
from dpjax.queries._name_search import name_search as name_search
from dpjax.queries._quantiles import QuantileScores as QuantileScores
from dpjax.queries._quantiles import quantile_scores as quantile_scores
from dpjax.queries._several_selections import SeveralSelections as SeveralSelections
from dpjax.queries._several_selections import select_each as select_each
from dpjax.queries._top_k import TopK as TopK
from dpjax.queries._top_k import top_k as top_k
