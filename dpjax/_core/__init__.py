"""Value types, argument checks and frozen pytrees, which all other modules of dpjax use."""
