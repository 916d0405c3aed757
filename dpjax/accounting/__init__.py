"""What several releases promise together."""

from dpjax.accounting._adaptive import PrivacyFilter as PrivacyFilter
from dpjax.accounting._adaptive import PrivacyOdometer as PrivacyOdometer
from dpjax.accounting._compose_at import compose_at as compose_at
from dpjax.accounting._composition import compose as compose
from dpjax.accounting._composition import group as group
from dpjax.accounting._composition import post_process as post_process
from dpjax.accounting._composition import transfer as transfer
from dpjax.accounting._concentrated import zcdp_to_epsilon as zcdp_to_epsilon
