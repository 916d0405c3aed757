"""Random keys (ChaCha20), and distributions of noise."""

from dpjax.random._chacha20 import CHACHA20
from dpjax.random._keys import KeyLedger, secure_key, seeded_key
from dpjax.random._noise import GAUSSIAN, LAPLACE, Noise

__all__ = ["CHACHA20", "GAUSSIAN", "LAPLACE", "KeyLedger", "Noise", "secure_key", "seeded_key"]
