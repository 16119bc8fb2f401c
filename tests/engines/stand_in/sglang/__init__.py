"""Stands in for SGLang, which does not run on the machines of CI: its routes and answers, and no model.

A token is a function of seed and position, as in SGLang's deterministic mode, so that a joined response can be checked.
The prompt's first token is the fault to commit; 0 is none.
"""
