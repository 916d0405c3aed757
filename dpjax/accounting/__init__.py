"""What several releases promise together."""

from dpjax.accounting._composition import compose as compose
from dpjax.accounting._composition import group as group
from dpjax.accounting._composition import transfer as transfer
from dpjax.accounting._dp_sgd import Sampling as Sampling
from dpjax.accounting._dp_sgd import dp_sgd as dp_sgd
from dpjax.accounting._dp_sgd import dp_sgd_noise_multiplier as dp_sgd_noise_multiplier
from dpjax.accounting._events import compose_events as compose_events
