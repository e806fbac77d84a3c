"""The paper's figure and tables, reproduced from data to page.

digits         the images: embedded, from a folder, or downloaded
data           tasks, samples and their preparation
variants       the settings that are compared at equal (ε, δ)
setting        how much is run, and the folder that keeps finished parts
influence      influence curves measured on auxiliary data
figure         every variant, tuned and run
quadratics     bounds compared with measured excess risk where all constants are known
tables         both tables of bounds
results        `Results`, `Cell` and the other values, and their JSON
reproduction   `reproduce`: runs parts, merges them with earlier ones and writes everything
page           the HTML page; `figure_page` and `table_page` write its two parts
output         CSV files and pictures
"""

from diminuendo import _extras

with _extras.needed("torch", extra="all", purpose="Reproducing the paper"):
    from diminuendo.paper.reproduction import reproduce
    from diminuendo.paper.results import Cell, Results

__all__ = ["Cell", "Results", "reproduce"]
