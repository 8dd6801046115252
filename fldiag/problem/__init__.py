"""A loss as a function of weights: model, loss and data in one form, checked, with exact and estimated curvature."""
