"""What published results give away: membership, reconstruction, tracing and linkage."""

from dpjax.attacks._claim_comparison import ClaimComparison as ClaimComparison
from dpjax.attacks._claim_comparison import compare_with_claim as compare_with_claim
from dpjax.attacks._claim_comparison import highest_true_positive_rate as highest_true_positive_rate
from dpjax.attacks._lira import lira as lira
from dpjax.attacks._membership_trials import likelihood_ratio as likelihood_ratio
from dpjax.attacks._membership_trials import membership_trials as membership_trials
from dpjax.attacks._rmia import rmia as rmia
from dpjax.attacks._roc_curve import RocCurve as RocCurve
from dpjax.attacks._roc_curve import TruePositiveRate as TruePositiveRate
from dpjax.attacks._roc_curve import roc_curve as roc_curve
from dpjax.attacks._shadow_models import ShadowModels as ShadowModels
from dpjax.attacks._shadow_models import logit_confidence as logit_confidence
from dpjax.attacks._shadow_models import shadow_models as shadow_models
