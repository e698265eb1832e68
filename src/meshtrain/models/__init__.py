"""Models as plain nn.Modules that also run alone, each with a parallel plan. Not what applies the plans."""
