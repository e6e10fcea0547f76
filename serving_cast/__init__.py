"""Layouts, KV blocks, steady states and the search: from priced steps to a serving plan."""
