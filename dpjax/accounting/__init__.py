"""What several releases promise together."""

from dpjax.accounting._composition import compose as compose
from dpjax.accounting._composition import group as group
from dpjax.accounting._composition import transfer as transfer
