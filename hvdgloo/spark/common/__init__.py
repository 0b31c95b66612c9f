"""Code shared by the estimators of all frameworks."""
