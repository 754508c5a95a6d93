"""What all pictures share: SVG elements, colours, number formats, pages with embedded data. No torch."""
