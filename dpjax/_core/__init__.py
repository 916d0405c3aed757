"""Value types, argument checks and frozen pytrees, which all other packages of dpjax use."""
