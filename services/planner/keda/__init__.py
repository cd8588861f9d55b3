"""KEDA's external scaler contract."""
