"""A classifier of scikit-learn's kind."""
