"""Pictures."""
def plot_residuals(report): raise NotImplementedError
