"""Faults that are injected at every named point of a run, by each rule."""
