"""The verbs, one public function each. Steps do not import one another; they meet through records."""
