"""The papers, reproduced: a package for each with its CLAIMS, a module for each experiment with Settings, run, check.

An experiment is a grid of settings that know nothing of one another:

    Settings       one point of the grid; `Settings.grid(size, seeds)` lists them, for size "quick" or "full"
    run(settings)  measures it: plain numbers out, no files, the same numbers for the same settings
    check(points)  one verdict for each claim that the experiment decides
    draw(points)   charts, the paper's own numbers among them where it gives any
    RECIPE         if there is one, its number (1 before): raised when something that Settings do not name changes
"""
