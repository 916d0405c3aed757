"""Keys, and the noise that releases are made of."""

from dpjax.random._chacha20 import CHACHA20 as CHACHA20
from dpjax.random._keys import KeyLedger as KeyLedger
from dpjax.random._keys import secure_key as secure_key
from dpjax.random._keys import seeded_key as seeded_key
from dpjax.random._noise import GAUSSIAN as GAUSSIAN
from dpjax.random._noise import LAPLACE as LAPLACE
from dpjax.random._noise import Noise as Noise
